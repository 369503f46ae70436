//! Tests of `draconis-bucket`.

mod common;

mod campaign;
mod commits;
mod conformance;
mod journal;
mod journal_campaign;
mod layout;
mod long_outages;
mod outages;
mod read_ahead;
mod resize_crashes;
mod writers;
