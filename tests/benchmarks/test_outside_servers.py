"""benchmarks/outside_servers.py compares like with like: our rounds, counted as each server counts."""

from outside_servers import Counts, counted_as

from eagle3.head_files.servers import LLAMA_CPP, VLLM


def test_vllm_counts_drafts_beyond_the_end_as_our_decoder_does() -> None:
    assert counted_as(VLLM, [[3, 0, 3], [1]], [8, 3], max_new_tokens=8, steps=3) == Counts(4, 7)


def test_llama_cpp_drafts_no_more_than_are_left_and_counts_no_forward_without_drafts() -> None:
    # After 1 + 4 + 1 tokens of 8 one draft is left; after 1 + 4 + 2 of 8 none.
    assert counted_as(LLAMA_CPP, [[3, 0, 3]], [8], max_new_tokens=8, steps=3) == Counts(3, 4)
    assert counted_as(LLAMA_CPP, [[3, 1, 3]], [8], max_new_tokens=8, steps=3) == Counts(2, 4)
    assert counted_as(LLAMA_CPP, [[3, 0, 3]], [10], max_new_tokens=96, steps=3) == Counts(3, 6)


def test_llama_cpp_counts_no_drafts_behind_the_end_of_an_answer() -> None:
    assert counted_as(LLAMA_CPP, [[3, 0, 3]], [8], max_new_tokens=96, steps=3) == Counts(3, 4)
