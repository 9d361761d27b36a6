"""The Streamlit script, in a folder of its own.

Streamlit serves every file of a folder named `pages` beside its script without running the script
first, so a script that lay beside `pages` could be gone around: navigation and token gate would not
run.
"""
