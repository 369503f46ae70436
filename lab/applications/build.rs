//! Makes tests of the programs in the book that the main workspace cannot compile.

use std::path::Path;

fn main() {
    let page = "../../docs/book/src/libraries.md";
    println!("cargo::rerun-if-changed={page}");
    let page = std::fs::read_to_string(page).expect("the book's page about the libraries");
    let out = std::env::var_os("OUT_DIR").expect("set by Cargo");
    let programs = page.replace("```rust,ignore", "```rust");
    std::fs::write(Path::new(&out).join("libraries.md"), programs).expect("space for the page");
}
