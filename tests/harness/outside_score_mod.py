"""ALiBi, a score mod from outside the tree, as a user writes it in one file, and kernels that take
it, right ones and wrong ones."""

ALIBI = '''
    """ALiBi (Press et al., arXiv 2108.12409): a bias that grows with the key's position."""

    from dataclasses import dataclass
    from typing import ClassVar

    import torch

    from references.premises import Premise
    from references.score_mods import Rounding, ScoreMod


    @dataclass(frozen=True)
    class Alibi(ScoreMod):
        """f(s) = s + slope_h (k - q), with slope_h = 2^(-steps (h + 1) / heads) in fp32."""

        steps: float
        word: ClassVar[str] = "alibi"
        steepest: ClassVar[float] = 1.0
        breaks = frozenset({Premise.POSITION_FREE_SCORES, Premise.NORM_BOUNDED_SCORES})

        @property
        def text(self):
            return str(self.steps)

        @classmethod
        def parse(cls, text):
            return cls(float(text))

        @classmethod
        def gallery(cls):
            return cls(8.0), cls(1.0)

        def slopes(self, heads):
            return torch.tensor([2.0 ** (-self.steps * (h + 1) / heads) for h in range(heads)])

        def function(self, extent, device="cpu"):
            slopes = self.slopes(extent.heads).double().to(device)
            return lambda s, b, h, q, k: s.add_(slopes[h] * (k - q))

        def precise(self, mp, extent, score, at):
            _, h, q, k = at
            return score + mp.mpf(float(self.slopes(extent.heads)[h])) * (k - q)

        def slope(self, modified):
            return None

        def reach(self, extent, size):
            farthest = max(extent.seqlen_q, extent.seqlen_kv)
            return size + float(self.slopes(extent.heads).max()) * farthest

        def moved(self, size, error, modified):
            return error

        def roundings(self, extent):
            """A kernel in base 2 rounds log2 e, and a slope times it; the bias, and the sum."""
            return Rounding("added", 3), Rounding("result", 1)
'''
KERNEL = """
    import math
    from dataclasses import replace

    import torch

    from alibi_mod import Alibi
    from verify.variant import (
        Contract,
        GradientNumerics,
        GradientProducts,
        GradientSoftmax,
        GradientSums,
        Numerics,
        Output,
        Products,
        ScoreGradient,
        Softmax,
        Support,
        Variant,
    )

    SUPPORT = Support(
        dtypes=("float16", "bfloat16", "float32"),
        head_dims=(16, 32, 64),
        masks=("full", "causal", "lengths"),
        grouped_heads=True,
        score_mods=("alibi",),
    )


    def right(slopes, distance):
        return slopes[:, None, None] * distance


    def steeper(slopes, distance):
        return 1.01 * slopes[:, None, None] * distance


    def flipped(slopes, distance):
        signs = torch.where(torch.arange(len(slopes)) == len(slopes) - 1, -1.0, 1.0)
        return signs[:, None, None] * slopes[:, None, None] * distance


    def of_the_next_row(slopes, distance):
        return slopes[:, None, None] * (distance - 1)


    def scores(args, bias):
        group = args.heads_q // args.heads_kv
        k, v = (t.float().repeat_interleave(group, 1) for t in (args.k, args.v))
        lengths = args.seqlen_q, args.seqlen_kv
        seen = args.mask.dense(args.batch, args.heads_q, *lengths)
        s = args.q.float() @ k.mT * args.softmax_scale
        if args.score_mod is not None:
            assert isinstance(args.score_mod, Alibi)
            steps, heads = args.score_mod.steps, torch.arange(args.heads_q)
            slopes = torch.exp2(-steps * (heads + 1.0).double() / args.heads_q).float()
            distance = (torch.arange(lengths[1]) - torch.arange(lengths[0])[:, None]).float()
            s = s + bias(slopes, distance)
        return s.masked_fill(~seen, -math.inf), seen, k, v


    def forward_by(bias, support):
        def forward(args, out, lse, workspace):
            support.check(args, out)
            s, _, _, v = scores(args, bias)
            top = s.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
            e = torch.exp(s - top)
            total = e.sum(-1, keepdim=True)
            out.copy_(torch.where(total == 0, 0.0, e / total) @ v)
            lse.copy_((top + total.log())[..., 0])

        return forward


    def backward_by(bias, support):
        def backward(args, saved, dout, gradients, workspace):
            support.check_backward(args, saved, dout, gradients)
            s, seen, k, v = scores(args, bias)
            dout, lse = dout.float(), saved.lse[..., None]
            p = torch.where(seen, torch.exp(s - torch.where(lse == -math.inf, math.inf, lse)), 0.0)
            delta = (saved.out.float() * dout).sum(-1, keepdim=True)
            ds = torch.where(seen, p * (dout @ v.mT - delta), 0.0)
            group = args.heads_q // args.heads_kv
            dk = ds.mT @ args.q.float() * args.softmax_scale
            dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, p.mT @ dout))
            gradients.copy_(ds @ k * args.softmax_scale, dk, dv)

        return backward


    def variant(name, bias, of_backward=None, support=SUPPORT):
        return Variant(
            name=name,
            family="torch",
            forward=forward_by(bias, support),
            backward=backward_by(of_backward or bias, support),
            support=support,
            numerics=Numerics(
                products=Products(operands="float32"),
                softmax=Softmax(exp="vexp", block_n=0),
                output=Output(probability="float32", normalised=True),
            ),
            gradients=GradientNumerics(
                products=GradientProducts(operands="float32"),
                softmax=GradientSoftmax(exp="vexp", probability="float32"),
                score_gradient=ScoreGradient(dtype="float32"),
                sums=GradientSums(block_m=0, block_n=0),
            ),
            contract=Contract(),
        )


    VARIANTS = [
        variant("right", right),
        variant("steeper", steeper),
        variant("flipped", flipped),
        variant("next-row", of_the_next_row),
        variant("steeper-backward", right, steeper),
        variant("flipped-backward", right, flipped),
        variant("untold", right, support=replace(SUPPORT, score_mods=())),
    ]
"""
