"""Train EAGLE-3 draft heads: prompts → answers → features → head → SGLang checkpoint. See README.md."""
