"""The SGLang adapter. What of SGLang it reaches is in `seams`, and nothing else imports SGLang.

`start.py` prepares the process and calls `load.py`, which loads a rank's part of the model
(`boot.py`) and makes a `SglangEngine`. It implements the door `ModelEngine`; `steps.py` holds its
captured graphs. `support.py` refuses or corrects what SGLang computes wrongly.
"""
