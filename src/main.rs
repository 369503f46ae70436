//! The `draconis` command.

fn main() {}
