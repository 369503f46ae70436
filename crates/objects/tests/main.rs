//! Tests of `draconis-objects`.

mod campaign;
mod check;
mod crash_during_open;
mod disk;
mod examples;
mod followers;
mod full_store_cost;
mod hostile;
mod injected_faults;
mod layouts;
mod lost_segment;
mod model;
mod names;
mod read_paths;
mod salvage;
mod snapshots;
mod soak;
mod threads;
mod unlocked_waits;
