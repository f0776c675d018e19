"""SGLang plugin that turns EAGLE-3 off and on per decode step. Importing it imports neither sglang
nor torch.
"""
