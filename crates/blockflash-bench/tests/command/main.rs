//! The command from outside: what it prints, writes and refuses, on the CPU with small shapes.
//!
//! A command is a line of words. It runs in a folder of its test, so files have short names.

mod attention;
mod decode;
mod examples;
mod files;
mod guide;
mod harness;
mod mask;
mod measuring;
mod products;
mod report;
