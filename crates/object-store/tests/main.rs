//! Tests of `draconis-object-store`.

mod common;

mod bucket;
mod memory;
mod power_cuts;
mod store;
mod suite;
