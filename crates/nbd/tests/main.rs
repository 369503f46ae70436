//! Tests of `draconis-nbd`.

mod extended;
mod protocol;
