"""What the CuTe forward is asked on the CPU."""

from __future__ import annotations

# By what they are about.
SHAPES = (
    "sq=1,skv=1",
    "sq=64,skv=64",
    "sq=130,skv=70,mask=causal",
    "sq=129,skv=33,mask=causal.tl",
    "sq=33,skv=200,mask=causal.tl",
    "b=2,hq=4,hkv=2,sq=67,skv=150",
    "sq=5,skv=0",
    "sq=70,skv=3,mask=causal",
    "sq=65,skv=97,scale=-0.3",
    "sq=9,skv=40,scale=0.0",
    "sq=140,skv=257,mask=causal,dist=increasing",
    "sq=70,skv=300,dist=sink,scale=40.0",  # a block whose weights are 0 beside the next one
    "sq=140,skv=300,mask=window.20.9",
    "b=2,hq=2,hkv=1,sq=66,skv=65,lq=bshd.p8,lk=sbhd.o8,lv=bhsd.p16.xb,lo=bshd.p8.o8",
)
MASKS = (
    "sq=70,skv=131,mask=causal",
    "sq=70,skv=60,mask=window.20.inf.tl",
    "b=2,sq=80,skv=130,mask=lengths.70_0.100_33",
    "sq=70,skv=90,mask=causal+documents.30_60",
    "hq=2,hkv=1,sq=66,skv=100,mask=prefix.75",
)
