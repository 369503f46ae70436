//! Helper of the lab: each process runs one workload on one store, or on memory under pressure.
//!
//! ```text
//!   draconis-lab ── command line ──▶ kv: a store that others wrote, or ours
//!                ◀── one line JSON ── memory: a mapping that is larger than what may stay
//! ```
//!
//! A separate program, so that the lab itself needs neither C++ nor unsafe code, and so that a
//! memory limit affects the workload alone.
#![deny(unsafe_code)]

mod buckets;
#[cfg(any(feature = "leveldb", feature = "rocksdb"))]
mod cxx;
#[cfg(feature = "draconis-kv")]
mod draconis_store;
#[cfg(feature = "fjall")]
mod fjall_store;
mod group;
mod keys;
mod kv;
mod latency;
#[cfg(feature = "lmdb")]
mod lmdb;
mod mapping;
mod memory;
mod open;
mod puts;
mod reads;
#[cfg(feature = "redb")]
mod redb_store;
#[cfg(feature = "slatedb")]
mod slate_store;

use clap::{Parser, Subcommand};

/// Benchmark other stores and memory (started by draconis-lab).
#[derive(Debug, Parser)]
#[command(name = "draconis-lab-peers", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Name the stores that this program was built with, one on each line.
    Stores,
    /// Benchmark puts.
    Kv(puts::Arguments),
    /// Benchmark verified reads.
    KvRead(reads::Arguments),
    /// Benchmark a store in a bucket.
    KvBucket(buckets::Arguments),
    /// Benchmark memory reads under memory pressure.
    Memory(memory::Arguments),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Stores => {
            for name in kv::STORE_NAMES {
                println!("{name}");
            }
            Ok(())
        }
        Command::Kv(arguments) => {
            println!("{}", serde_json::to_string(&puts::run(&arguments)?)?);
            Ok(())
        }
        Command::KvRead(arguments) => {
            println!("{}", serde_json::to_string(&reads::run(&arguments)?)?);
            Ok(())
        }
        Command::KvBucket(arguments) => {
            println!("{}", serde_json::to_string(&buckets::run(&arguments)?)?);
            Ok(())
        }
        Command::Memory(arguments) => {
            println!("{}", serde_json::to_string(&memory::run(&arguments)?)?);
            Ok(())
        }
    }
}
