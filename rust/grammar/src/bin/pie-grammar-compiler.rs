//! A compiler process by itself, for programs that are not Python: the program of a `CompilerCommand`.

fn main() -> std::io::Result<()> {
    pie_grammar::compiler_process()
}
