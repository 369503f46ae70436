//! Tests of `draconis-object-store`.

mod common;

mod bucket;
mod forks;
mod memory;
mod power_cuts;
mod store;
mod suite;
