//! Tests of `draconis-device`.

mod conformance;
mod loop_device;
