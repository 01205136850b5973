"""The loss of the model, its precision, and that checkpointing and compiling do not change it."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from delta_trn.backends import gated_delta_rule
from delta_trn.backends.layers import pytorch
from delta_trn.backends.layers.pytorch import LOGITS, compare_softmax_, count_tokens
from delta_trn.backends.parity.judge import error
from delta_trn.models.language_model import linear_cross_entropy
from tests.support.tiny_models import VARIANTS, VOCABULARY, assert_same, model, packed, tokens

PLACES = torch.cat([torch.arange(11), torch.arange(29)])[None]  # of two packed sequences
variants = pytest.mark.parametrize("variant", VARIANTS)


class TestLoss:
    def test_loss_and_gradients_are_those_of_cross_entropy(self):
        m, ids = model(), tokens(2, 30)
        inputs, targets = ids[:, :-1], ids[:, 1:].clone()
        targets[0, :7] = -100
        loss = m.loss(inputs, targets)
        gradients = torch.autograd.grad(loss, list(m.parameters()))
        expected = F.cross_entropy(m(inputs).logits.flatten(0, 1), targets.flatten())
        assert_same(loss, expected)
        for (name, _), a, b in zip(
            m.named_parameters(),
            gradients,
            torch.autograd.grad(expected, list(m.parameters())),
            strict=True,
        ):
            assert_same(a, b, what=name, factor=10)

    @pytest.mark.parametrize("tokens_at_once", [1, 3, 1000])
    def test_loss_does_not_depend_on_the_chunk_size(
        self, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
    ):
        m, ids = model(), tokens(2, 9)
        whole = m.loss(ids, ids)
        monkeypatch.setitem(LOGITS, "cpu", tokens_at_once * VOCABULARY)
        assert_same(m.loss(ids, ids), whole)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    def test_comparing_with_the_targets_equals_gathering_them(self, dtype: torch.dtype):
        """Neuron's form of the softmax, on a CPU; a shifted target is seen."""
        generator = torch.Generator().manual_seed(0)
        logits = (5 * torch.randn(7, 50, generator=generator)).to(dtype)
        target = torch.randint(0, 50, (7, 1), generator=generator)
        keep = torch.tensor([1, 0, 1, 1, 1, 0, 1], dtype=torch.promote_types(dtype, torch.float32))[
            :, None
        ]
        expected = pytorch._softmax_(logits, target, keep, True)
        torch.testing.assert_close(compare_softmax_(logits, target, keep, True), expected)
        assert not torch.allclose(
            compare_softmax_(logits, (target + 1) % 50, keep, True)[1], expected[1]
        )

    @pytest.mark.parametrize("vocabulary", [50304, 300, 2**29])
    def test_logits_on_neuron_are_whole_tiles_of_tokens(self, vocabulary: int):
        rows = count_tokens("xla", vocabulary)
        assert rows % 128 == 0 and rows > 0
        assert rows == 128 or rows * vocabulary <= LOGITS["neuron"]

    def test_labels_are_shifted_as_transformers_does(self):
        m, ids = model(), tokens(2, 30)
        labels = ids.clone()
        labels[:, :4] = -100
        expected = F.cross_entropy(m(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        assert_same(m(ids, labels=labels).loss, expected)

    def test_packed_sequences_do_not_predict_across_their_ends(self):
        m, ids = model(), tokens(1, 21)
        cu_seqlens, places = packed([1, 7, 0, 13])
        separate = [
            m(ids[:, p], labels=ids[:, p]).loss * (p.stop - p.start - 1)
            for p in (places[1], places[3])
        ]
        assert_same(m(ids, labels=ids, cu_seqlens=cu_seqlens).loss, sum(separate) / 18)

    def test_loss_and_gradients_are_zero_without_targets(self):
        m, ids = model(), tokens(1, 5)
        loss = m.loss(ids, torch.full_like(ids, -100))
        loss.backward()
        assert loss == 0 and all(not p.grad.any() for p in m.parameters())

    def test_no_logits_of_all_tokens_are_kept(self, monkeypatch: pytest.MonkeyPatch):
        """No tensor that autograd keeps, and no intermediate one, is as large as all logits."""
        monkeypatch.setitem(LOGITS, "cpu", 64 * VOCABULARY)
        m, ids = model(dtype=torch.float32), tokens(2, 256)
        largest = 0

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                nonlocal largest
                out = func(*args, **(kwargs or {}))
                for x in out if isinstance(out, (tuple, list)) else [out]:
                    if isinstance(x, Tensor) and x.dim() and x.shape[-1] == VOCABULARY:
                        largest = max(largest, x.numel())
                return out

        with Watch():
            m.loss(ids, ids).backward()
        assert 0 < largest <= 64 * VOCABULARY < ids.numel() * VOCABULARY

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_huge_logits_stay_finite(self, dtype: torch.dtype):
        hidden = torch.tensor([[300.0, -300.0], [0.0, 0.0]], dtype=dtype, requires_grad=True)
        weight = torch.tensor([[300.0, 0.0], [0.0, 300.0]], dtype=dtype, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, torch.tensor([1, 0]), 1.0)
        loss.backward()
        assert loss.item() == pytest.approx((180_000 + math.log(2)) / 2, rel=2**-8)
        assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


class TestPrecision:
    def test_gates_and_norms_stay_float32_under_autocast(self):
        dtypes: dict[str, torch.dtype] = {}
        m, ids = model(dtype=torch.float32), tokens(2, 20)

        def watch(q, k, v, g, beta, **options):
            dtypes.update(q=q.dtype, v=v.dtype, g=g.dtype, beta=beta.dtype)
            return gated_delta_rule(q, k, v, g, beta, **options)

        for block in m.model.blocks:
            block.mixer.scan = watch
        norms = []
        m.model.norm.register_forward_hook(
            lambda _, args, y: norms.append((args[0].dtype, y.dtype))
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = m.loss(ids, ids)
        loss.backward()
        half, full = torch.bfloat16, torch.float32
        assert dtypes == {"q": half, "v": half, "g": full, "beta": full}
        assert norms == [(torch.float32, torch.float32)] and loss.dtype == torch.float32
        assert {p.grad.dtype for p in m.parameters()} == {torch.float32}

    @pytest.mark.parametrize("source", ["autocast", "weights"])
    def test_bfloat16_error_is_that_of_its_roundings(self, source: str):
        """Allows twice sqrt(3) times the error of rounding weights:
        inputs and outputs are rounded too.
        """
        exact, ids = model(dtype=torch.float32), tokens(2, 70)
        rounded = copy.deepcopy(exact).to(torch.bfloat16)
        with torch.no_grad():
            expected = exact(ids).logits
            of_weights = error(copy.deepcopy(rounded).float()(ids).logits, expected)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=source == "autocast"):
                logits = (exact if source == "autocast" else rounded)(ids).logits
        assert logits.dtype == torch.bfloat16
        assert 0.5 * of_weights < error(logits.float(), expected) < 2 * 3**0.5 * of_weights


class TestTransformations:
    @variants
    def test_gradient_checkpointing_gives_the_same_gradients(self, variant: str):
        m, ids = model(**VARIANTS[variant]).train(), tokens(2, 20)
        m.loss(ids, ids).backward()
        plain = {name: p.grad.clone() for name, p in m.named_parameters()}
        m.zero_grad()
        m.gradient_checkpointing_enable()
        calls = []
        m.model.blocks[0].mixer.register_forward_hook(lambda *_: calls.append(1))
        m.loss(ids, ids).backward()
        assert len(calls) == 2, "checkpointing runs a block forward twice"
        assert all(torch.equal(p.grad, plain[name]) for name, p in m.named_parameters())

    def compiled_and_eager(self, autocast: bool, **changes: Any) -> list[list[Tensor]]:
        """Returns [compiled, eager] lists of the loss and every gradient of packed sequences."""
        torch._dynamo.reset()
        m, ids = model(dtype=torch.float32, **changes).train(), tokens(1, 41)
        compiled = torch.compile(m.loss, backend="aot_eager", fullgraph=True, dynamic=False)
        results = []
        for function in (compiled, m.loss):
            m.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = function(ids[:, :-1], ids[:, 1:], PLACES)
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in m.parameters())])
        return results

    def test_training_compiles_into_one_graph(self):
        for a, b in zip(
            *self.compiled_and_eager(False, num_hidden_layers=2, attention_layers=[1]), strict=True
        ):
            assert_same(a, b, factor=10)

    def test_training_compiles_under_autocast(self):
        """Both round to bfloat16 in different places,
        so they may differ as much as from float32.
        """
        changes = {"num_hidden_layers": 1}
        m, ids = model(dtype=torch.float32, **changes), tokens(1, 41)
        loss = m.loss(ids[:, :-1], ids[:, 1:], PLACES)
        loss.backward()
        exact = [loss.detach(), *(p.grad for p in m.parameters())]
        for a, b, x in zip(*self.compiled_and_eager(True, **changes), exact, strict=True):
            assert error(a, b) <= 2 * error(b, x) + 2**-9
