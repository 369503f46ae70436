//! Prints where the Rust files given have what cargo-mutants changes, as lines of
//! `kind file start end part-start part-end`, in bytes. `tools/mutants` builds it.

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

struct Printer<'a>(&'a str);

impl Printer<'_> {
    fn print(&self, kind: &str, whole: Span, part: Span) {
        let (whole, part) = (whole.byte_range(), part.byte_range());
        println!("{kind} {} {} {} {} {}", self.0, whole.start, whole.end, part.start, part.end);
    }
}

impl<'ast> Visit<'ast> for Printer<'_> {
    fn visit_expr_binary(&mut self, it: &'ast syn::ExprBinary) {
        self.print("binary", it.span(), it.op.span());
        visit::visit_expr_binary(self, it);
    }

    fn visit_expr_unary(&mut self, it: &'ast syn::ExprUnary) {
        self.print("unary", it.span(), it.op.span());
        visit::visit_expr_unary(self, it);
    }

    fn visit_arm(&mut self, it: &'ast syn::Arm) {
        match &it.guard {
            Some((_, guard)) => self.print("guarded", it.pat.span(), guard.span()),
            None => self.print("arm", it.pat.span(), it.pat.span()),
        }
        visit::visit_arm(self, it);
    }

    fn visit_expr_struct(&mut self, it: &'ast syn::ExprStruct) {
        for (rest, field) in
            it.rest.iter().flat_map(|rest| it.fields.iter().map(move |it| (rest, it)))
        {
            self.print("field", field.expr.span(), rest.span());
        }
        visit::visit_expr_struct(self, it);
    }
}

fn main() {
    for file in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&file).expect("a readable file");
        Printer(&file).visit_file(&syn::parse_file(&text).expect("Rust"));
    }
}
