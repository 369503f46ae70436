
# Paths, where options and names of commands leave off: files of this machine, and after
# IMAGE:/ what is in the volume, which `draconis complete-path` lists by a confined process.
_draconis_paths() {
    local line=${COMP_LINE:0:COMP_POINT}
    local word=${line##*[[:space:]]}
    local rest=${line%"$word"} piece
    # A blank behind a backslash belongs to the word.
    while [[ $rest == *\\[[:blank:]] ]]; do
        piece=${rest%?}
        piece=${piece##*[[:space:]]}
        word="$piece ${word}"
        rest=${rest%?}
        rest=${rest%"$piece"}
    done

    COMPREPLY=()
    _draconis "$@"
    local reply kept=()
    for reply in "${COMPREPLY[@]}"; do
        case "$reply" in
            # What only programs use.
            worker | complete-path) ;;
            -*) [[ $word == -* || $COMP_CWORD -le 1 ]] && kept+=("$reply") ;;
            *) kept+=("$reply") ;;
        esac
    done
    COMPREPLY=("${kept[@]}")
    [[ $COMP_CWORD -gt 1 && $word != -* ]] || return 0
    # The values of an option, or the commands of a command.
    local before=${rest%"${rest##*[![:space:]]}"}
    case "${before##*[[:space:]]}" in
        --progress | --layout | --hint | --sparse | store | kv | completions | help) return 0 ;;
    esac

    # Behind a quotation mark a word has blanks and colons, and is replaced as a whole.
    local text=${word//\\/} quoted=${COMP_WORDS[COMP_CWORD]}
    if [[ $quoted == [\"\']* ]]; then
        text=${quoted:1}
    else
        quoted=
    fi
    COMPREPLY=()
    if [[ $text != *:/* ]]; then
        while IFS= read -r reply; do
            COMPREPLY+=("$reply")
        done < <(compgen -f -- "$text")
        compopt -o filenames 2>/dev/null
        # A path in an image may follow.
        if [[ ${#COMPREPLY[@]} -eq 1 && -f ${COMPREPLY[0]} ]]; then
            compopt -o nospace 2>/dev/null
        fi
    else
        local place=() at
        for ((at = 1; at < COMP_CWORD; at++)); do
            case "${COMP_WORDS[at]}" in
                --offset | --partition)
                    [[ ${COMP_WORDS[at + 1]} == = ]] && reply=${COMP_WORDS[at + 2]} ||
                        reply=${COMP_WORDS[at + 1]}
                    place+=("${COMP_WORDS[at]}=$reply")
                    ;;
            esac
        done
        while IFS= read -r reply; do
            COMPREPLY+=("${text%%:/*}:$reply")
        done < <("$1" complete-path "${place[@]}" -- "$text" 2>/dev/null)
        compopt -o filenames 2>/dev/null
        if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]]; then
            compopt -o nospace 2>/dev/null
        fi
    fi
    # Bash replaces only what is behind the last colon.
    if [[ -z $quoted && $COMP_WORDBREAKS == *:* && $text == *:* ]]; then
        local head=${text%"${text##*:}"}
        for at in "${!COMPREPLY[@]}"; do
            COMPREPLY[at]=${COMPREPLY[at]#"$head"}
        done
    fi
}

complete -F _draconis_paths -o bashdefault draconis
