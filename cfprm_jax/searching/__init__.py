"""Search guided by a PRM: methods over a policy that takes steps and a reward that scores them."""
