//! The lab: Draconis and its peers, measured side by side in one run.
//!
//! Nothing uses this crate. It drives the programs that people use: the kernel's loop
//! mount, `fuse2fs`, `draconis mount`, `find`, `tar`.
#![forbid(unsafe_code)]

mod change;
mod crash;
mod machine;
mod memory;
mod mount;
mod store_crash;
mod subject;
mod table;
mod tools;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Draconis measured beside its peers.
#[derive(Debug, Parser)]
#[command(name = "draconis-lab", version)]
struct Cli {
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    /// Reading through mounts: the kernel's loop mount, fuse2fs and Draconis. Needs root.
    Mount(MountArguments),
    /// Changing volumes through mounts: the kernel's loop mount, fuse2fs, Draconis, and a
    /// server that does nothing. Needs root.
    Change(ChangeArguments),
    /// Serve an empty tree in memory, which forgets contents, until it is unmounted.
    #[command(hide = true)]
    Memory {
        /// Let the kernel keep what is written for a while.
        #[arg(long)]
        write_back: bool,
        /// The directory.
        at: PathBuf,
    },
    /// Making volumes: mke2fs -d and draconis format --from.
    Tools(ToolsArguments),
    /// Power cuts: every state that workloads can leave, judged.
    Crash(crash::CrashArguments),
    /// Power cuts of object stores: every state that changes can leave, judged.
    StoreCrash(store_crash::StoreCrashArguments),
}

/// What `change` measures, and with what.
#[derive(Debug, clap::Args)]
struct ChangeArguments {
    /// The draconis program.
    #[arg(long, default_value = "target/release/draconis")]
    draconis: PathBuf,
    /// The tree that is copied.
    #[arg(long, default_value = "/usr/share")]
    tree: PathBuf,
    /// Small files that are made.
    #[arg(long, default_value_t = 20_000)]
    files: u32,
    /// Length of the file that is written in sequence, in MiB.
    #[arg(long, default_value_t = 400)]
    file_mib: u64,
    /// Appends that are made durable one by one.
    #[arg(long, default_value_t = 500)]
    appends: u32,
    /// How often each is measured, in turns.
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// Where the images go; needs the room for the tree.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Only the experiments whose name holds this.
    #[arg(long)]
    only: Option<String>,
    /// Leave a subject out; may be repeated.
    #[arg(long, value_name = "SUBJECT")]
    without: Vec<String>,
}

/// What `tools` measures, and with what.
#[derive(Debug, clap::Args)]
struct ToolsArguments {
    /// The draconis program.
    #[arg(long, default_value = "target/release/draconis")]
    draconis: PathBuf,
    /// The tree that volumes are filled with.
    #[arg(long, default_value = "/usr/share")]
    tree: PathBuf,
    /// How often each is measured, in turns.
    #[arg(long, default_value_t = 5)]
    repeat: usize,
    /// Where the images go; needs the room for the tree.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
}

/// What `mount` measures, and with what.
#[derive(Debug, clap::Args)]
struct MountArguments {
    /// The draconis program.
    #[arg(long, default_value = "target/release/draconis")]
    draconis: PathBuf,
    /// The tree that the volume is filled with.
    #[arg(long, default_value = "/usr/share")]
    tree: PathBuf,
    /// Length of the file that is read in sequence, in MiB (the paper's: 350).
    #[arg(long, default_value_t = 350)]
    file_mib: u64,
    /// How often each is measured, in turns.
    #[arg(long, default_value_t = 5)]
    repeat: usize,
    /// Where the images go; needs the room for the tree, twice.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Only the experiments whose name holds this.
    #[arg(long)]
    only: Option<String>,
    /// Write JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().experiment {
        Experiment::Mount(arguments) => mount::run(&arguments),
        Experiment::Change(arguments) => change::run(&arguments),
        Experiment::Memory { write_back, at } => change::serve_memory(&at, write_back),
        Experiment::Tools(arguments) => tools::run(&arguments),
        Experiment::Crash(arguments) => crash::run(&arguments),
        Experiment::StoreCrash(arguments) => store_crash::run(&arguments),
    }
}
