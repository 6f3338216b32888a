"""The Streamlit application."""
