//! Tests of `draconis-exchange`.

mod common;

mod conformance;
mod kill;
mod reader;
