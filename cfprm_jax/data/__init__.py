"""From labelled corpora to batches. The readers and the windows are public:

for trajectory in cfprm_jax.data.read("phase1_train.jsonl"):
    coarse = cfprm_jax.data.merge(trajectory, 2)
"""

from cfprm_jax.data.formats import read
from cfprm_jax.data.trajectory import Trajectory
from cfprm_jax.data.windows import merge

__all__ = ["Trajectory", "merge", "read"]
