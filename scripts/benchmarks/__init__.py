"""The benchmark behind scripts/bench.py: one short file per contender, and what measures and reports them.

`clock` measures; `works` says what is trained and which targets hold; `raw`, `floor`, `keras_mlp` and `lightning_mlp`
are the contenders that are not Leyden, on the parts that `experiment` builds; `timer` has the callbacks that measure
Leyden and Lightning; `processes` runs each measurement by itself; `results` is the JSON and its arithmetic, `report`
the tables; `profiling` says where Leyden's time goes.
"""
