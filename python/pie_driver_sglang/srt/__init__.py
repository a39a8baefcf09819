"""The SGLang adapter: the only package that knows SGLang.

`start.py` prepares the process and calls `load.py`, which loads a rank's part of the model
(`boot.py`) and makes a `SglangEngine`. That engine implements the `Engine` door; `steps.py` holds
its captured graphs. `support.py` refuses or corrects what SGLang computes wrongly. Everything of
SGLang that these modules reach is in `seams`, and nothing else imports SGLang.
"""
