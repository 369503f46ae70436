//! The contracts. The plain data that their messages carry is in `draconis_types`.
//!
//! A contract is written once, with [`contract!`](crate::contract!), in its own module: [`disk`],
//! [`mod@file`], [`directory`], [`volume`]. Read the contract first; everything else in those
//! modules follows from it.

pub mod define;
pub mod directory;
pub mod disk;
pub mod file;
pub mod fsm;
pub mod request_log;
pub mod tree;
pub mod volume;
pub mod wire;

pub use define::{Awaiting, Call, CallResult, Contract, Request, State};
pub use wire::{List, Violation};
