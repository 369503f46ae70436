//! Tests of `draconis-access`.

mod store;
mod volume;
