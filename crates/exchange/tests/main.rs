//! Tests of `draconis-exchange`.

mod common;

mod conformance;
mod examples;
mod kill;
mod reader;
