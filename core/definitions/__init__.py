"""What the ops compute: functional forms, each with its native definition and its fake rule, a family per file."""
