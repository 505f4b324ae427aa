"""`async-rl plan`: how long an iteration would take on other devices, simulated from what a run has measured.

`costs` reads a run's records and fits what a decoding step, a prompt, a window, an optimizer step and a publish cost;
`simulation` computes one iteration from these costs for any numbers of instances and replicas, `batches` the mean of
several, and which numbers are best.
"""
