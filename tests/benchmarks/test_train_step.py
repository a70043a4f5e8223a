"""The benchmark of a training step runs, and counts the products that are really computed."""

import json

import pytest
import torch
from random_head import SMALL, RandomSamples
from step_cost import kernel_group, product_flops
from torch.utils.flop_counter import FlopCounterMode
from train_step import main, random_step, training_run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*treespec, LeafSpec.*", "ignore:Checkpoint directory.*"
)


@pytest.mark.slow
def test_a_small_run_writes_a_row_for_each_case(tmp_path):
    main(["--small", "--out", str(tmp_path / "rows.json"), "ttt_steps=3"])
    result = json.loads((tmp_path / "rows.json").read_text())
    assert {"commit", "command", "machine", "versions"} <= set(result)
    rows = result["rows"]
    assert [(row["tokens"], row["documents"], row["answer_share"]) for row in rows] == [(96, 1, 1), (128, 4, 0.5)]
    for row in rows:
        assert {"peak_gb", "host_waits", "recompiles", "top_kernels_ms"} <= set(row)
        assert all(row[key] > 0 for key in ("tokens_per_s", "reference_tokens_per_s", "tflops", "ceiling_tflops"))
        assert row["ms_by_group"]["matrix products"] > 0


@pytest.mark.parametrize("trained", [True, False])
def test_the_flop_of_a_step_are_those_of_its_matrix_products(trained):
    steps = 3
    overrides = ["ttt_steps=3", "kernels=plain", "trainer.precision=32-true"]
    run = training_run([*overrides, f"model.train_lm_head={trained}"])
    step = random_step(SMALL, run)
    batch = RandomSamples(SMALL, torch.float32, seed=0).pack([40, 30], 0.5, ttt_steps=steps)
    with FlopCounterMode(display=False) as counter:
        step(batch)
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    rows = len(batch.anchors)
    # The plain step also computes pairs that are not trained (a turn's last rows at later steps) and unasked teachers.
    expected = product_flops(SMALL, tokens=70, rows=rows, pairs=steps * rows, trains_lm_head=trained)
    unasked = 2 * (len(batch.pack.last_hidden_state) - rows) * SMALL.hidden_size * SMALL.draft_vocab_size
    assert counted == expected + unasked


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("_one_pair", "loss and softmax"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "norms and elementwise"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "other"),
    ],
)
def test_kernels_are_told_apart(kernel, group):
    assert kernel_group(kernel) == group
