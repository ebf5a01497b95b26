//! Finds the kernels that a source text defines, so that their names are written in one place only.
//! Never parses C++: it knows the two forms that the files use, a plain definition and a macro that pastes names.
//! Surprising fact: a macro may expand to other macros; names are expanded until none is left.

/// A macro whose body defines or names kernels.
struct Macro {
    name: String,
    params: Vec<String>,
    body: String,
}

/// Names of all kernels in `text`.
pub(super) fn of(text: &str) -> Vec<String> {
    let (macros, rest) = split_macros(text);
    let mut names = plain_names(&rest);
    for line in rest.lines() {
        expand(line, &macros, &mut names);
    }
    names
}

/// Macros with parameters, and the text without them.
fn split_macros(text: &str) -> (Vec<Macro>, String) {
    let joined = text.replace("\\\n", " ");
    let (mut macros, mut rest) = (Vec::new(), String::new());
    for line in joined.lines() {
        match line.strip_prefix("#define ").and_then(|l| Some((l.split_once('(')?, l))) {
            Some(((name, tail), _)) if !name.contains(' ') => {
                let (params, body) = tail.split_once(')').unwrap_or((tail, ""));
                let params = params.split(',').map(|p| p.trim().to_owned()).collect();
                macros.push(Macro { name: name.to_owned(), params, body: body.to_owned() });
            }
            _ => {
                rest += line;
                rest.push('\n');
            }
        }
    }
    (macros, rest)
}

/// Names behind `extern "C" __global__ void`, with an optional launch bound.
fn plain_names(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    for part in text.split("extern \"C\" __global__ void").skip(1) {
        let mut part = part.trim_start();
        if let Some(bound) = part.strip_prefix("__launch_bounds__(") {
            part = bound.split_once(')').map_or("", |(_, after)| after).trim_start();
        }
        let name: String = part.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        names.push(name);
    }
    names
}

/// Adds the kernels that the macro calls of `line` define.
fn expand(line: &str, macros: &[Macro], names: &mut Vec<String>) {
    for call in macros {
        let mark = format!("{}(", call.name);
        for (at, _) in line.match_indices(&mark) {
            let before = line[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
                continue;
            }
            let Some((args, _)) = line[at + mark.len()..].split_once(')') else { continue };
            let body = call
                .params
                .iter()
                .zip(args.split(','))
                .fold(call.body.clone(), |body, (param, arg)| substitute(&body, param, arg.trim()));
            let body = body.replace("##", "");
            names.extend(plain_names(&body));
            expand(&body, macros, names);
        }
    }
}

/// `body` with the word `param` replaced.
fn substitute(body: &str, param: &str, arg: &str) -> String {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut out = String::new();
    let mut rest = body;
    while let Some(at) = rest.find(param) {
        let (before, from) = rest.split_at(at);
        let after = &from[param.len()..];
        let whole = !before.chars().next_back().is_some_and(is_word) && !after.chars().next().is_some_and(is_word);
        out += before;
        out += if whole { arg } else { param };
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_and_pasted_names_are_found() {
        let text = "extern \"C\" __global__ void one(int a) {}\n\
            extern \"C\" __global__ void __launch_bounds__(128) two(\n    int a\n) {}\n\
            #define IN(name, n) extern \"C\" __global__ void __launch_bounds__(X) \\\n    k_##name##_n##n() {}\n\
            #define BOTH(name) IN(name, 1) IN(name, 4)\nBOTH(q8_0)\nIN(f16, 2)\n";
        assert_eq!(of(text), ["one", "two", "k_q8_0_n1", "k_q8_0_n4", "k_f16_n2"]);
    }
}
