//! Tests of `draconis-sqlite`.

mod common;

mod analytics;
mod buckets;
mod crashes;
mod database;
mod forks;
mod long;
mod power_cuts;
mod processes;
mod scripts;
