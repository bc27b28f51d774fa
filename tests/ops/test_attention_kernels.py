"""Attention kernels against softmax attention written out."""

import pytest
import torch
from faulty_kernels import FAULTS, Faulty

from trl.ops import attention_kernels as flash
from trl.ops.attention_kernels import (
    CpuFlash,
    CudaEfficient,
    CudaFlash,
    Heads,
    check_kernel,
    choose_kernel,
    expanded,
    merge,
    merge_heads,
)

SCALE = 0.3
SHAPES = [  # rows, query heads, key heads, queries, keys, head size
    (1, 4, 4, 5, 5, 8),
    (2, 4, 2, 7, 7, 8),
    (3, 6, 1, 1, 9, 16),
    (1, 4, 2, 9, 4, 8),
    (2, 2, 2, 40, 40, 12),
]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def inputs(shape, dtype=torch.float64, device="cpu"):
    rows, heads, shared, queries, keys, size = shape
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, queries), (shared, keys), (shared, keys))
    return [
        torch.randn(rows, *part, size, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for part in shapes
    ]


def definition(query, key, value, causal):
    """Softmax attention and its log-normalizer, one head at a time."""
    outputs, normalizers = [], []
    for head in range(query.shape[1]):
        shared = head // (query.shape[1] // key.shape[1])
        scores = SCALE * query[:, head] @ key[:, shared].transpose(1, 2)
        if causal:
            hidden = torch.ones(scores.shape[1:], device=scores.device).triu(1).bool()
            scores = scores.masked_fill(hidden, -torch.inf)
        outputs.append(scores.softmax(-1) @ value[:, shared])
        normalizers.append(scores.logsumexp(-1))
    return torch.stack(outputs, 1), torch.stack(normalizers, 1)


def error(ours, theirs):
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def check(kernel, shape, causal, dtype, device, bound):
    tensors = inputs(shape, dtype, device)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected, expected_normalizer = definition(*exact, causal)
    upstream = torch.linspace(-1, 1, expected.numel(), device=device).view(expected.shape)
    upstream = upstream.to(dtype)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    with torch.no_grad():
        output, normalizer = kernel.forward(tensors, causal, SCALE)
        saved = (*tensors, output, normalizer)
        found = kernel.backward(upstream, saved, causal, SCALE)
    assert error(output, expected) < bound
    assert error(normalizer, expected_normalizer) < bound
    for ours, theirs, tensor in zip(found, wanted, tensors, strict=True):
        assert ours.shape == tensor.shape
        assert error(ours, theirs) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_of_cpus(shape, causal, dtype, bound):
    if causal and shape[3] != shape[4]:
        causal = False  # causal attention is for queries at the places of the keys
    check(CpuFlash(), shape, causal, dtype, "cpu", bound)


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_of_cpus_in_half_precision(causal):
    check(CpuFlash(), (2, 4, 2, 7, 7, 8), causal, torch.bfloat16, "cpu", 0.02)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 2, 7, 7, 8), (1, 4, 4, 130, 130, 64)])
@pytest.mark.parametrize(
    ("kernel", "dtype", "bound"),
    [
        (CudaFlash(), torch.bfloat16, 0.02),
        (CudaFlash(), torch.float16, 0.005),
        (CudaEfficient(), torch.float32, 1e-4),
        (CudaEfficient(), torch.bfloat16, 0.02),
    ],
)
def test_the_kernels_of_gpus(kernel, dtype, bound, shape, causal):
    check(kernel, shape, causal, dtype, "cuda", bound)


def test_flash_attention_of_gpus_takes_grouped_heads():
    """The shapes that torch states for the kernel: gradients are those of the keys as given."""
    query, key = torch.empty(1, 8, 4, 64, device="meta"), torch.empty(1, 2, 9, 64, device="meta")
    output, normalizer = CudaFlash().forward((query, key, key), False, SCALE)
    assert output.shape == query.shape and normalizer.shape == query.shape[:3]
    found = CudaFlash().backward(output, (query, key, key, output, normalizer), False, SCALE)
    assert [x.shape for x in found] == [query.shape, key.shape, key.shape]


def test_efficient_attention_of_gpus_gives_normalizers_of_queries():
    """The shapes that torch states for the kernel, which pads normalizers on a GPU."""
    query, key = torch.empty(1, 8, 4, 64, device="meta"), torch.empty(1, 2, 9, 64, device="meta")
    output, normalizer = CudaEfficient().forward((query, key, key), False, SCALE)
    assert output.shape == query.shape and normalizer.shape == query.shape[:3]
    found = CudaEfficient().backward(output, (query, key, key, output, normalizer), False, SCALE)
    assert [x.shape for x in found] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_attention_over_two_sets_of_keys_is_their_merge(monkeypatch, cut):
    monkeypatch.setattr(flash, "MERGED_ON_CPU", 130)  # two of the three queries
    kernel, (query, key, value) = CpuFlash(), inputs((2, 4, 2, 3, 9, 8))
    expected, normalizer = definition(query, key, value, False)
    parts = [
        kernel.forward((query, key[:, :, at], value[:, :, at]), False, SCALE)
        for at in (slice(0, cut), slice(cut, None))
    ]
    found = merge(*parts)
    assert error(found[0], expected) < 1e-12
    assert error(found[1], normalizer) < 1e-12


def test_gradients_of_a_part_follow_from_the_whole():
    """Given output and normalizer of all keys, those of each part of the keys are its own."""
    kernel, tensors = CpuFlash(), inputs((2, 4, 2, 3, 9, 8))
    query, key, value = tensors
    expected, _ = definition(*tensors, False)
    upstream = torch.linspace(-1, 1, expected.numel()).view(expected.shape).double()
    wanted = torch.autograd.grad(expected, tensors, upstream)
    output, normalizer = kernel.forward((query, key, value), False, SCALE)
    of_query = torch.zeros_like(query)
    for at in (slice(0, 4), slice(4, None)):
        saved = (query, key[:, :, at], value[:, :, at], output, normalizer)
        found = kernel.backward(upstream, saved, False, SCALE)
        of_query += found[0]
        assert error(found[1], wanted[1][:, :, at]) < 1e-12
        assert error(found[2], wanted[2][:, :, at]) < 1e-12
    assert error(of_query, wanted[0]) < 1e-12


def test_a_set_without_weight_changes_nothing():
    output = torch.tensor([[[[1.0, 2.0]]]])
    other = torch.tensor([[[[5.0, 7.0]]]])
    normalizer, none = torch.tensor([[[3.0]]]), torch.tensor([[[-torch.inf]]])
    merged, total = merge((output, normalizer), (other, none))
    assert torch.equal(merged, output) and torch.equal(total, normalizer)


def test_merging_is_stable_for_large_normalizers():
    """exp(900) is infinite; the weights of a merge are 3/4 and 1/4."""
    first = (torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 900.0 + torch.tensor(3.0).log()))
    second = (torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), 900.0))
    merged, total = merge(first, second)
    assert torch.allclose(merged, torch.tensor(0.75), atol=1e-4)
    assert torch.allclose(total, 900.0 + torch.tensor(4.0).log())


def test_heads_are_expanded_and_merged():
    query = torch.zeros(1, 6, 2, 4)
    keys = torch.arange(16.0).view(1, 2, 2, 4)
    _, wide = expanded((query, keys))
    assert all(torch.equal(wide[:, head], keys[:, head // 3]) for head in range(6))
    grad = torch.arange(48.0).view(1, 6, 2, 4)
    merged = merge_heads(grad, keys)
    assert torch.equal(merged[:, 0], grad[:, 0] + grad[:, 1] + grad[:, 2])
    assert torch.equal(merged[:, 1], grad[:, 3] + grad[:, 4] + grad[:, 5])
    same = torch.zeros(1, 6, 3, 4)
    assert expanded((query, same))[1] is same and merge_heads(same, same) is same


@pytest.mark.parametrize(
    ("device", "dtype", "size", "kernel"),
    [
        ("cpu", torch.float64, 5, CpuFlash),
        ("cpu", torch.bfloat16, 64, CpuFlash),
        pytest.param("cuda", torch.bfloat16, 64, CudaFlash, marks=[pytest.mark.gpu, gpu]),
        pytest.param("cuda", torch.float16, 512, CudaEfficient, marks=[pytest.mark.gpu, gpu]),
        pytest.param("cuda", torch.float32, 64, CudaEfficient, marks=[pytest.mark.gpu, gpu]),
    ],
)
def test_which_kernel_is_chosen(device, dtype, size, kernel):
    assert type(choose_kernel(torch.empty(1, 1, 1, size, dtype=dtype, device=device))) is kernel


@pytest.mark.parametrize(
    ("size", "has_flash", "has_efficient", "kernel"),
    [
        (64, True, True, CudaFlash),
        (64, True, False, CudaFlash),
        (64, False, True, CudaEfficient),  # float32, or half precision on GPUs before sm80
        (12, True, True, CudaEfficient),
        (12, True, False, None),
        (64, False, False, None),  # bfloat16 on GPUs before sm80
    ],
)
def test_what_torch_says_of_a_gpu_decides(monkeypatch, size, has_flash, has_efficient, kernel):
    """It is asked about heads as they train: gradients count, even where none are recorded."""
    asked = []

    def answers(answer):
        return lambda facts: asked.append((facts, torch.is_grad_enabled())) or answer

    monkeypatch.setattr(flash, "can_use_flash_attention", answers(has_flash))
    monkeypatch.setattr(flash, "can_use_efficient_attention", answers(has_efficient))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    choose = flash._kernel_of_gpu.__wrapped__
    with torch.no_grad():
        if kernel is None:
            with pytest.raises(
                NotImplementedError, match=f"some GPU .*bfloat16 heads of size {size}"
            ):
                choose(torch.device("cpu"), torch.bfloat16, size)
        else:
            assert type(choose(torch.device("cpu"), torch.bfloat16, size)) is kernel
    for facts, records in asked:
        assert facts.query.dtype == torch.bfloat16 and facts.query.shape[-1] == size
        assert records and facts.query.requires_grad and not facts.is_causal


def test_other_devices_have_none():
    with pytest.raises(NotImplementedError, match="devices of type meta"):
        choose_kernel(torch.empty(1, 1, 1, 8, device="meta"))


# --- The check of a kernel: a small example tells right ones from wrong ones ---

WIDTHS = [(4, 2, 8), (6, 1, 64), (2, 2, 12)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def heads(dtype, queries=4, keys=2, size=8) -> Heads:
    return Heads(torch.device("cpu"), dtype, queries, keys, size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_of_this_machine_is_right(dtype):
    """Whatever the precision of autocast is around the check."""
    with torch.autocast("cpu", torch.bfloat16):
        for widths in WIDTHS:
            check_kernel(CpuFlash(), heads(dtype, *widths))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_kernel_is_found(fault, dtype):
    kernel = Faulty(fault, [dtype])
    with pytest.raises(
        RuntimeError, match=r"off by .* for 4 query and 2 key heads of size 8 in \w+\d+,"
    ):
        check_kernel(kernel, heads(dtype))
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    check_kernel(kernel, heads(other))


def test_a_kernel_that_cannot_run_is_an_error():
    with pytest.raises(RuntimeError, match="no kernel image"):
        check_kernel(Faulty("error", [torch.float32]), heads(torch.float32))
