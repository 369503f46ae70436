//! Tests of `draconis-device`.

mod conformance;
mod examples;
mod loop_device;
mod process;
