"""The dashboard's pages: files that Streamlit runs from top to bottom on each visit."""
