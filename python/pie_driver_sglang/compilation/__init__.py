"""Kernels are compiled ahead of their launches, in parallel processes and without a GPU.

===================  ===============================================================================
``dry_model``        what the kernels of a driver's steps depend on
``dry_run``          runs the steps of all graphs with fake tensors and a stand-in for the model
``launch_recorder``  records the kernels that launch code would launch
``compile_pool``     compiles them into the caches of Triton and NVRTC
===================  ===============================================================================

A backend says what a model is like: SGLang's is `backends/sglang/compile_ahead.py`.
"""
