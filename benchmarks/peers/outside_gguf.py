"""Converts a target or a head for llama.cpp, in float32; run by benchmarks/peers/outside_servers.py.

python outside_gguf.py LLAMA_CPP_TREE MODEL FILE.gguf [--target-model-dir TARGET] calls the tree's converter.
The converter refuses tokenizers that it does not know. Here prompts are token ids, so it takes such a tokenizer for
GPT-2's, which changes only how llama.cpp would split text.
"""

import sys


def main(tree: str, model: str, file: str, *options: str) -> None:
    sys.path.insert(0, tree)
    import convert_hf_to_gguf
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def known_or_gpt2(self: TextModel, tokenizer: object) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = known_or_gpt2
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", file, "--outtype", "f32", *options]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
