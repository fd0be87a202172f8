class Inputs: pass
