//! Tests of `draconis-access`.

mod examples;
mod forks;
mod store;
mod volume;
