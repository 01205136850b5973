"""Estimates on Hopper, without a GPU: machine code, run on a model of one SM.

module       what it does
machine      the model's numbers and what each instruction costs
simulate     runs machine code on the model, which is simulate.cpp
work         what a call launches at each shape, and the bytes it must move
calibration  holds the model against published times of an H200
__main__     the command
"""
