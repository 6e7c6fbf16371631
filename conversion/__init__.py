"""Turns a RoPE checkpoint into a head-wise hybrid one: analyze, allocate, convert, calibrate, distill."""
