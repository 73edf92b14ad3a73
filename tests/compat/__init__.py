"""`make compat`: is what eaglelab relies on in SGLang's sources still there, release by release?"""
