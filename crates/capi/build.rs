//! Gives the shared library its name for the loader: programs ask for the major version that they
//! were linked with.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libdraconis.so.0");
}
