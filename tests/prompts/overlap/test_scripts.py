"""Words in scripts other than Latin: marks belong to words, and clauses count as many words as in English."""

import unicodedata

import pytest
from prompt_stage import users

from eagle3.prompts import Prompt
from eagle3.prompts.overlap.leaks import Benchmark, LeakCheck
from eagle3.prompts.overlap.words import WORD, Units, words

# A lead-in of eight English words, a question of fifteen, and three others.
CLAUSES = {
    "English": (
        "Please answer the following question in one sentence",
        "which is the longest river of this country, and into which sea does it flow?",
        ("how does rain form", "why does bread rise", "what is a computer"),
    ),
    "Russian": (
        "Пожалуйста, ответьте на следующий вопрос одним предложением",
        "какая река в этой стране самая длинная и в какое море она впадает?",
        ("как образуется дождь", "почему поднимается тесто", "что такое компьютер"),
    ),
    "Vietnamese": (
        "Vui lòng trả lời câu hỏi sau đây bằng một câu",
        "con sông dài nhất của đất nước này là sông nào và nó chảy ra biển nào?",
        ("mưa hình thành thế nào", "vì sao bánh mì nở", "máy tính là gì"),
    ),
    "Hindi": (
        "कृपया निम्नलिखित प्रश्न का उत्तर एक वाक्य में दीजिए",
        "इस देश की सबसे लंबी नदी कौन सी है और वह किस समुद्र में गिरती है?",
        ("वर्षा कैसे होती है", "रोटी क्यों फूलती है", "कंप्यूटर क्या है"),
    ),
    "Bengali": (
        "অনুগ্রহ করে নিচের প্রশ্নের উত্তর এক বাক্যে দিন",
        "এই দেশের দীর্ঘতম নদী কোনটি এবং সেটি কোন সাগরে গিয়ে পড়ে?",
        ("বৃষ্টি কীভাবে হয়", "রুটি কেন ফোলে", "কম্পিউটার কী"),
    ),
    "Tamil": (
        "தயவுசெய்து பின்வரும் கேள்விக்கு ஒரே வாக்கியத்தில் பதிலளிக்கவும்",
        "இந்த நாட்டின் மிக நீளமான ஆறு எது, அது எந்தக் கடலில் கலக்கிறது?",
        ("மழை எப்படி பெய்கிறது", "ரொட்டி ஏன் உப்புகிறது", "கணினி என்றால் என்ன"),
    ),
    "Telugu": (
        "దయచేసి కింది ప్రశ్నకు ఒకే వాక్యంలో సమాధానం ఇవ్వండి",
        "ఈ దేశంలో అతి పొడవైన నది ఏది, అది ఏ సముద్రంలో కలుస్తుంది?",
        ("వర్షం ఎలా కురుస్తుంది", "రొట్టె ఎందుకు పొంగుతుంది", "కంప్యూటర్ అంటే ఏమిటి"),
    ),
    "Malayalam": (
        "ദയവായി താഴെ കൊടുത്തിരിക്കുന്ന ചോദ്യത്തിന് ഒറ്റ വാക്യത്തിൽ ഉത്തരം നൽകുക",
        "ഈ രാജ്യത്തെ ഏറ്റവും നീളമുള്ള നദി ഏതാണ്, അത് ഏത് കടലിലാണ് ചേരുന്നത്?",
        ("മഴ എങ്ങനെ പെയ്യുന്നു", "അപ്പം എന്തുകൊണ്ട് പൊങ്ങുന്നു", "കമ്പ്യൂട്ടർ എന്നാൽ എന്ത്"),
    ),
    "Arabic": (
        "مِنْ فَضْلِكَ أَجِبْ عَنِ السُّؤَالِ التَّالِي بِجُمْلَةٍ وَاحِدَةٍ",
        "مَا أَطْوَلُ نَهْرٍ فِي هٰذَا الْبَلَدِ وَفِي أَيِّ بَحْرٍ يَصُبُّ مَاؤُهُ؟",
        ("كَيْفَ يَتَكَوَّنُ الْمَطَرُ", "لِمَاذَا يَنْتَفِخُ الْخُبْزُ", "مَا هُوَ الْحَاسُوبُ"),
    ),
    "Hebrew": (
        "בְּבַקָּשָׁה עֲנֵה עַל הַשְּׁאֵלָה הַבָּאָה בְּמִשְׁפָּט אֶחָד",
        "מַהוּ הַנָּהָר הָאָרֹךְ בְּיוֹתֵר בָּאָרֶץ הַזֹּאת וּלְאֵיזֶה יָם הוּא נִשְׁפָּךְ?",
        ("אֵיךְ נוֹצָר גֶּשֶׁם", "לָמָּה תּוֹפֵחַ הַלֶּחֶם", "מַה זֶּה מַחְשֵׁב"),
    ),
    "Korean": (
        "다음 질문에 한 문장으로 대답해 주십시오",
        "이 나라에서 가장 긴 강은 무엇이며 그 강은 어느 바다로 흘러 들어갑니까?",
        ("비는 어떻게 내립니까", "빵은 왜 부풉니까", "컴퓨터란 무엇입니까"),
    ),
    "Thai": (
        "กรุณาตอบคำถามต่อไปนี้ด้วยประโยคเดียว",
        "แม่น้ำที่ยาวที่สุดของประเทศนี้คือแม่น้ำอะไร และไหลลงสู่ทะเลใด",
        ("ฝนเกิดขึ้นได้อย่างไร", "ทำไมขนมปังจึงฟู", "คอมพิวเตอร์คืออะไร"),
    ),
    "Lao": (
        "ກະລຸນາຕອບຄຳຖາມຕໍ່ໄປນີ້ດ້ວຍປະໂຫຍກດຽວ",
        "ແມ່ນ້ຳທີ່ຍາວທີ່ສຸດຂອງປະເທດນີ້ແມ່ນແມ່ນ້ຳຫຍັງ ແລະໄຫຼລົງສູ່ທະເລໃດ",
        ("ຝົນເກີດຂຶ້ນໄດ້ແນວໃດ", "ເປັນຫຍັງເຂົ້າຈີ່ຈຶ່ງຟູ", "ຄອມພິວເຕີແມ່ນຫຍັງ"),
    ),
    "Khmer": (
        "សូមឆ្លើយសំណួរខាងក្រោមនេះជាប្រយោគតែមួយ",
        "តើទន្លេណាដែលវែងជាងគេនៅក្នុងប្រទេសនេះ ហើយវាហូរចូលទៅក្នុងសមុទ្រណា",
        ("តើភ្លៀងកើតឡើងយ៉ាងដូចម្តេច", "ហេតុអ្វីបានជានំប៉័ងប៉ោង", "កុំព្យូទ័រគឺជាអ្វី"),
    ),
    "Burmese": (
        "ကျေးဇူးပြု၍ အောက်ပါမေးခွန်းကို ဝါကျတစ်ကြောင်းတည်းဖြင့် ဖြေပါ",
        "ဤနိုင်ငံ၏ အရှည်ဆုံးမြစ်သည် မည်သည့်မြစ်ဖြစ်ပြီး မည်သည့်ပင်လယ်ထဲသို့ စီးဝင်သနည်း",
        ("မိုးဘယ်လိုရွာသလဲ", "ပေါင်မုန့်ဘာကြောင့်ဖောင်းသလဲ", "ကွန်ပျူတာဆိုတာဘာလဲ"),
    ),
    "Chinese": (
        "请用一句话回答下面的这个问题",
        "这个国家最长的河是哪一条，它最后流入哪一片大海？",  # noqa: RUF001 these are meant
        ("雨是怎么形成的", "面包为什么会发起来", "什么是计算机"),
    ),
    "Japanese": (
        "次の質問に一つの文で答えてください",
        "この国で一番長い川はどれで、その川はどの海に流れ込んでいますか",
        ("雨はどうやって降りますか", "パンはなぜふくらみますか", "コンピューターとは何ですか"),
    ),
}


@pytest.mark.parametrize("language", CLAUSES)
def test_a_shared_lead_in_is_no_leak_and_a_question_of_a_benchmark_is_one_copied_or_inside_of_a_prompt(
    language,
):
    lead_in, question, others = CLAUSES[language]
    check = LeakCheck([Benchmark("one", [], [f"{lead_in}: {question}", question], 0)], dropped_words=13)
    leaks = [question, f"{others[0]}. {question} {others[1]}", f"{lead_in}\n\n{question}"]

    def reasons(texts: list[str], form: str) -> set[str | None]:
        turns = [users(unicodedata.normalize(form, text)) for text in texts]
        return {check(Prompt(id="", source="", license=None, messages=messages)).reason for messages in turns}

    for form in ("NFC", "NFD"):
        assert reasons([f"{lead_in}. {other}" for other in others], form) == {None}
        assert reasons(leaks, form) == {"leak: one"}


@pytest.mark.parametrize("language", CLAUSES)
def test_a_clause_has_as_many_words_as_in_english(language):
    def count(language: str) -> float:
        lead_in, question, others = CLAUSES[language]
        return Units(words(" ".join((lead_in, question, *others)))).before[-1] / WORD

    assert 0.67 < count(language) / count("English") < 1.5
