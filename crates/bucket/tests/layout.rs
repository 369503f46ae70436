//! Conformance of the layout for buckets.

#[test]
fn the_layout_for_buckets_is_a_layout() {
    draconis_objects::layout::conform::check_all(draconis_objects::LayoutKind::Bucket);
}
