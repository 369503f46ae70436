//! Programs of others on a Draconis store: the tests run them, `make applications`.

/// The programs of the book's page, as tests.
#[doc = include_str!(concat!(env!("OUT_DIR"), "/libraries.md"))]
#[cfg(doctest)]
struct BookPrograms;
