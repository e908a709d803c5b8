import pytest
import torch
from small_models import random_params, small_llama

import atbx
from atbx.models import llama
from atbx.schedule import Policy, Request


def prompts(*l):
    g = torch.Generator().manual_seed(3)
    return [torch.randint(61, (n,), generator=g).tolist() for n in l]


@pytest.mark.parametrize("block", [1, 16, 128])
@pytest.mark.parametrize("changes", [{}, {"window": 5}])
def test_equal(block, changes):
    c = small_llama(**changes)
    p = random_params(c)
    pol = Policy(c.context, chunk=16)
    for kw in ({}, {"temperature": 0.8, "seed": 4}):
        a = atbx.generator(llama.forward, c, policy=pol)
        b = atbx.generator(llama.forward, c, policy=pol, block_size=block)
        pr = prompts(3, 40, 17, 1, 9)
        assert a(p, pr, max_new_tokens=20, **kw).tokens == b(p, pr, max_new_tokens=20, **kw).tokens
        assert a(p, pr, max_new_tokens=20, **kw).tokens == b(p, pr, max_new_tokens=20, **kw).tokens
        assert a.score(p, pr).total if hasattr(a.score(p, pr), "total") else True


def test_plan():
    c = small_llama()
    p = random_params(c)
    b = atbx.generator(llama.forward, c, block_size=16)
    b.warm(p, [Request((3, 40, 5), 20)])
    b.freeze()
    b(p, prompts(3, 40, 5), max_new_tokens=20)
    assert str(b.explain(p, prompt=3, batch=2))
