//! Tests of `draconis-access`.

mod examples;
mod store;
mod volume;
