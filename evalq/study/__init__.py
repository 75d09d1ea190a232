"""What a report and `evalq inspect` are made from: records found, judged where they were not, and looked into."""
