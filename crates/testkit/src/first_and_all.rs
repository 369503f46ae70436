//! Tests over many seeds or volumes: the first of them in `make test`, all in `make test-all`.

/// Defines the test `$first` of the first `$count` items, and the long test `$all` of all.
#[macro_export]
macro_rules! first_and_all {
    ($first:ident($count:expr), $all:ident, $items:expr, $run:expr) => {
        #[test]
        fn $first() {
            ($items).into_iter().take($count).for_each($run);
        }

        #[test]
        #[ignore = "long: all items of a test that takes the first ones"]
        fn $all() {
            ($items).into_iter().for_each($run);
        }
    };
}
