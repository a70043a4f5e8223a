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
    "Hindi": (
        "कृपया निम्नलिखित प्रश्न का उत्तर एक वाक्य में दीजिए",
        "इस देश की सबसे लंबी नदी कौन सी है और वह किस समुद्र में गिरती है?",
        ("वर्षा कैसे होती है", "रोटी क्यों फूलती है", "कंप्यूटर क्या है"),
    ),
    "Tamil": (
        "தயவுசெய்து பின்வரும் கேள்விக்கு ஒரே வாக்கியத்தில் பதிலளிக்கவும்",
        "இந்த நாட்டின் மிக நீளமான ஆறு எது, அது எந்தக் கடலில் கலக்கிறது?",
        ("மழை எப்படி பெய்கிறது", "ரொட்டி ஏன் உப்புகிறது", "கணினி என்றால் என்ன"),
    ),
    "Arabic": (
        "مِنْ فَضْلِكَ أَجِبْ عَنِ السُّؤَالِ التَّالِي بِجُمْلَةٍ وَاحِدَةٍ",
        "مَا أَطْوَلُ نَهْرٍ فِي هٰذَا الْبَلَدِ وَفِي أَيِّ بَحْرٍ يَصُبُّ مَاؤُهُ؟",
        ("كَيْفَ يَتَكَوَّنُ الْمَطَرُ", "لِمَاذَا يَنْتَفِخُ الْخُبْزُ", "مَا هُوَ الْحَاسُوبُ"),
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
    "Khmer": (
        "សូមឆ្លើយសំណួរខាងក្រោមនេះជាប្រយោគតែមួយ",
        "តើទន្លេណាដែលវែងជាងគេនៅក្នុងប្រទេសនេះ ហើយវាហូរចូលទៅក្នុងសមុទ្រណា",
        ("តើភ្លៀងកើតឡើងយ៉ាងដូចម្តេច", "ហេតុអ្វីបានជានំប៉័ងប៉ោង", "កុំព្យូទ័រគឺជាអ្វី"),
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
    language: str,
) -> None:
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
def test_a_clause_has_as_many_words_as_in_english(language: str) -> None:
    def count(language: str) -> float:
        lead_in, question, others = CLAUSES[language]
        return Units(words(" ".join((lead_in, question, *others)))).before[-1] / WORD

    assert 0.67 < count(language) / count("English") < 1.5
