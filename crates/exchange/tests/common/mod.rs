//! Helpers of the test suites: servers, and the transports they use.
#![allow(dead_code, missing_docs)]

pub mod transport;

use std::time::{Duration, Instant};

use draconis_types::Name;

pub const TEST_TIMEOUT: Duration = draconis_testkit::wait::HANG_BOUND;

pub fn test_deadline() -> Instant {
    draconis_testkit::wait::hang_deadline()
}

pub fn name(name: &str) -> Name {
    Name::new(name.as_bytes()).unwrap()
}
