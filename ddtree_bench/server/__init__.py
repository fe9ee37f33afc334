"""The HTTP server over the engine: OpenAI's and SGLang's generation endpoints, metrics and the settings in effect."""
